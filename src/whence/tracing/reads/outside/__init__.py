"""What a model reads that is neither its own nor an argument: functions that ran, and objects they asked."""
