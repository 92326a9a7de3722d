"""The `tinsmith` command; each command is a thin shell around a function.

`__main__` has the table of commands, `failures` turns errors into one sentence and an exit code,
`output` shows results as a table or as JSON.
"""
