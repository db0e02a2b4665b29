"""Performance model: machines, costs, planners and predictions. It runs nothing on these machines."""
