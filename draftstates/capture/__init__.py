"""The SGLang plug-in, the only part of the package that imports SGLang."""
