"""The simplest connector, to be read first: blocks as files in a folder."""
