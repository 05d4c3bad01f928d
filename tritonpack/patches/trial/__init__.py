"""Small copies of models, and every form in which packed documents reach them, held against each document alone."""
