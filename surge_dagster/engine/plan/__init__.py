"""The cost model, its calibration and the plan of a run."""
