"""From conversation datasets to tokens and loss masks, with every row accounted for."""
