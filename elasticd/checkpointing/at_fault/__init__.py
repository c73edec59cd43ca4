"""A save at a fault: each step leaves a record, and a survivor saves the last step before its group is killed."""
