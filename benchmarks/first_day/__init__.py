"""All that is to be done on the first day with a GPU, in safe order: `python3 -m benchmarks.first_day`."""
