"""The layer inside serving engines: plugins that they load, off unless they are asked for."""
