"""MariaDB and MySQL, through aiomysql and PyMySQL: one set of messages, and two drivers that do the I/O."""
