from tests.kernels.conftest import _restore_machine_settings  # noqa: F401
