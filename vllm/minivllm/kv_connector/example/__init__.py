"""The simplest connector, to be read first: it stores blocks as files in a folder."""
