"""Text beyond bytes and tokens: chats, rows of files and repositories, object stores."""
