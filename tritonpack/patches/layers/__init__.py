"""New forwards for layers in which a mask alone doesn't keep documents apart."""
