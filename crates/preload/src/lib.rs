//! The socket proxy: translates libc's symbols to `portolan::posix` for programs that preload this library.
//!
//! It contains the list of symbols ([`table`]) and the translation of C structures. It holds no socket state and makes
//! no decisions: calls that do not concern Portolan go to the next definition of the symbol, unchanged.

#[macro_use]
mod interpose;
#[macro_use]
mod own;

mod address;
mod background;
mod buf;
mod buffers;
mod control;
mod descriptors;
mod environment;
mod exec;
mod extension;
mod file;
mod io;
mod memory;
mod message;
mod multiplex;
mod namespace;
mod number;
mod old_names;
mod process;
mod qos;
mod raw;
mod rights;
mod select;
mod signal;
mod socket;
mod splice;
mod stdio;
mod table;
mod thread;
mod time;
