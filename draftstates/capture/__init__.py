"""The SGLang plug-in: the only part that imports SGLang."""
