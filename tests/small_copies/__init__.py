"""Small random copies of models, for `tritonpack check` and for the sweep of all classes under tests/."""
