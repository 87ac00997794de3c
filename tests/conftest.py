"""What all tests share: how much hypothesis tries, and that a failure prints what replays it."""

from hypothesis import settings

settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)  # the same for all who change code
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=5_000)
settings.load_profile("ci")
