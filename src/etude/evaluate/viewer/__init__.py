"""Episodes in the browser: of a dataset, of files of other systems, or of a run."""
