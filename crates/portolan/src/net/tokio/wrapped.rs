//! What all sockets of this module have in common: a field `readiness`, and a field `socket` of a type of
//! [`net`](crate::net), which is non-blocking.

/// Conversion from and to the blocking type, and access to it and to its descriptor.
macro_rules! wraps {
    ($type:ident, $what:literal) => {
        impl $type {
            #[doc = concat!("Takes over ", $what, ", and makes it non-blocking.")]
            ///
            /// # Errors
            /// The process has no free descriptor, or cannot start a thread.
            pub fn from_blocking(socket: $crate::net::$type) -> ::std::io::Result<$type> {
                socket.set_nonblocking(true)?;
                $type::of_nonblocking(socket)
            }

            fn of_nonblocking(socket: $crate::net::$type) -> ::std::io::Result<$type> {
                let readiness = super::readiness::Readiness::new(&socket)?;
                Ok($type { readiness, socket })
            }

            #[doc = concat!("Makes ", $what, " a blocking one again.")]
            ///
            /// # Errors
            /// None is expected.
            pub fn into_blocking(self) -> ::std::io::Result<$crate::net::$type> {
                let $type { readiness, socket } = self;
                drop(readiness);
                socket.set_nonblocking(false)?;
                Ok(socket)
            }

            /// Returns the blocking type, for its options. It must stay non-blocking.
            pub fn get_ref(&self) -> &$crate::net::$type {
                &self.socket
            }

            /// Returns the local address.
            ///
            /// # Errors
            /// None is expected.
            pub fn local_addr(&self) -> ::std::io::Result<::std::net::SocketAddr> {
                self.socket.local_addr()
            }

            /// Takes the pending error (`SO_ERROR`).
            ///
            /// # Errors
            /// None is expected.
            pub fn take_error(&self) -> ::std::io::Result<Option<::std::io::Error>> {
                self.socket.take_error()
            }

            fn handle(&self) -> &$crate::net::handle::Handle<::std::net::$type> {
                self.socket.handle()
            }
        }

        /// As `from_blocking`.
        impl TryFrom<$crate::net::$type> for $type {
            type Error = ::std::io::Error;

            fn try_from(socket: $crate::net::$type) -> ::std::io::Result<$type> {
                $type::from_blocking(socket)
            }
        }

        impl ::std::os::fd::AsFd for $type {
            fn as_fd(&self) -> ::std::os::fd::BorrowedFd<'_> {
                self.socket.as_fd()
            }
        }

        impl ::std::os::fd::AsRawFd for $type {
            fn as_raw_fd(&self) -> ::std::os::fd::RawFd {
                self.socket.as_raw_fd()
            }
        }
    };
}
pub(super) use wraps;
