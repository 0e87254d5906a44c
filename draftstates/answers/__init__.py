"""Answers by the target model: prompts, the conversation with the server, the files of answers."""
