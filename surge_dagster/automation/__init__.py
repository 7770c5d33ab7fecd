"""What launches runs without being asked: sensors and schedules of a catalog."""
