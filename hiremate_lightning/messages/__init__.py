"""What users are told while a model trains."""
