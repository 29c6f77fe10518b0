"""A small model of the kernel in plain Python: what every call must answer, and what must be in the rows after it.

One module per concern. Owns the rules in their simplest form: one thing at a time, no locks, times in seconds since the
test began. It never talks to a database: ``tests.kernel.rules`` does, one module per concern again.
"""
