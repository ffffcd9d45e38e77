"""Settings of every test. Being here puts the folder above on the path, for ``tests.scripted_server`` and the like."""

from hypothesis import settings

# Its deadline of 200 ms an example would be a speed measurement, and other programs decide what that gives.
settings.register_profile("biphase", deadline=None)
settings.load_profile("biphase")
