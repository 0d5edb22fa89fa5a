"""The command line `callsheet`: one file for each command, and code that the commands share."""
