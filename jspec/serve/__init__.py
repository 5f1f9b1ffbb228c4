"""What turns names into models, and text into text."""
