"""What `infinity selftest` tries, each a file: trainings, a race, host memory and the optimizer on the device."""
