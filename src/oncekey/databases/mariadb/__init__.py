"""MariaDB and MySQL, through aiomysql and through PyMySQL: one set of messages, and two drivers that wait."""
