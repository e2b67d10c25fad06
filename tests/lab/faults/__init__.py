"""A campaign of faults against the command `hebbian`: `python -m tests.lab.faults`.

Kills, damaged bytes, a full disk and two processes in one folder must end in the result of an undisturbed run, or in
an error that says what to do. The campaign's table is in `results/reliability`.
"""
