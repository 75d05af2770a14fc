"""What all programs share: paths and names, options, text, files, the environment."""
