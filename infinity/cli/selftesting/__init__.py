"""The checks of `infinity selftest`: trainings, a race, and host memory and the optimizer on the device."""
