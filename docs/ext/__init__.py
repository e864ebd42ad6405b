"""What the documentation makes from the code."""
