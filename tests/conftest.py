"""Being here puts the folder above on the path: tests in any room import helpers as ``tests.scripted_server``."""
