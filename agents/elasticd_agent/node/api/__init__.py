"""The daemon's HTTP side: who may ask, what may be asked, and where the answers come from."""
