"""Tests of the actors' machinery, without a database and with a mock clock where time matters."""
