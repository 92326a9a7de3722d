"""Runs the official command again and again in one process: starting it takes two seconds.

Reads arguments and standard input as a line of JSON, and answers with exit code, output and errors.
"""

import contextlib
import io
import json
import sys

from tinker.cli.__main__ import main

questions, answers = sys.stdin, sys.stdout
for line in questions:
    arguments, typed = json.loads(line)
    sys.argv = ["tinker", *arguments]
    sys.stdin = io.StringIO(typed)
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)
