import os

from hypothesis import HealthCheck, settings

# "ci" finds the same examples every time; "dev" looks for new ones. HYPOTHESIS_PROFILE chooses.
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=300, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
