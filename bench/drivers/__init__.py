"""One process for each thing that is measured; see `bench.serve`."""
