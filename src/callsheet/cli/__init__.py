"""The commands of the command line. Each file has one."""
