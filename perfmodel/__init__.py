"""Performance model: machines, costs, planners and predictions, without running anything on them."""
