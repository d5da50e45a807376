"""What `infinity tune` consists of: processes that measure, and reports."""
