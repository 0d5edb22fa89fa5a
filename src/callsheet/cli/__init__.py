"""The command line `callsheet`: a file for each command, and what the commands share."""
