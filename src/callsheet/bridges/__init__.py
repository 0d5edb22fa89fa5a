"""Bridges: hosts run callsheet's callbacks in other frameworks' loops; guests run other frameworks' callbacks in callsheet's loop."""
