"""DynamoDB: a record in one item."""
