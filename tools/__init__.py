"""Programs for the project's own work that no user of the package runs."""
