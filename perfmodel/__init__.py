"""Performance model: machines, costs, planners and predictions. The machines need not be available."""
