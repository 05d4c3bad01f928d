"""Small copies of models, and the comparison of documents packed in every form with each document alone."""
