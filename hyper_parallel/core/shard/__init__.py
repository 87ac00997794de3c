"""Plans: which parameter, input and output of a model lies where, and what makes it so."""
