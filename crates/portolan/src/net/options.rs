//! Methods that read and set one option of a socket. Types that use these macros have a method `handle`.

/// Methods for an option that is on or off.
macro_rules! flag_option {
    ($what:literal, $name:ident, $setter:ident, $level:ident, $option:ident) => {
        #[doc = concat!("Returns whether ", $what, " (`", stringify!($option), "`).")]
        ///
        /// # Errors
        /// The option does not exist for the socket's address family.
        pub fn $name(&self) -> ::std::io::Result<bool> {
            let value = self
                .handle()
                .number_option(::libc::$level, ::libc::$option)?;
            Ok(value != 0)
        }

        #[doc = concat!("Sets whether ", $what, " (`", stringify!($option), "`).")]
        ///
        /// # Errors
        /// The option does not exist for the socket's address family.
        pub fn $setter(&self, is_on: bool) -> ::std::io::Result<()> {
            let value = i32::from(is_on);
            self.handle()
                .set_number(::libc::$level, ::libc::$option, value)
        }
    };
}

/// Methods for an option that is a number.
macro_rules! number_option {
    ($what:literal, $name:ident, $setter:ident, $level:ident, $option:ident) => {
        #[doc = concat!("Returns ", $what, " (`", stringify!($option), "`).")]
        ///
        /// # Errors
        /// The option does not exist for the socket's address family.
        pub fn $name(&self) -> ::std::io::Result<u32> {
            let value = self
                .handle()
                .number_option(::libc::$level, ::libc::$option)?;
            Ok(u32::try_from(value).unwrap_or(0))
        }

        #[doc = concat!("Sets ", $what, " (`", stringify!($option), "`).")]
        ///
        /// # Errors
        /// `InvalidInput`: the number is out of range. The option does not exist for the socket's address family.
        pub fn $setter(&self, value: u32) -> ::std::io::Result<()> {
            let value = i32::try_from(value).map_err(|_| ::std::io::ErrorKind::InvalidInput)?;
            self.handle()
                .set_number(::libc::$level, ::libc::$option, value)
        }
    };
}

/// `TCP_NODELAY`, `SO_KEEPALIVE` and `SO_LINGER`.
macro_rules! stream_options {
    () => {
        $crate::net::options::flag_option!(
            "small segments are sent without waiting for acknowledgements",
            nodelay,
            set_nodelay,
            IPPROTO_TCP,
            TCP_NODELAY
        );
        $crate::net::options::flag_option!(
            "an idle connection is probed",
            keepalive,
            set_keepalive,
            SOL_SOCKET,
            SO_KEEPALIVE
        );

        /// Returns how long closing the socket waits until the peer has acknowledged all data (`SO_LINGER`), in whole
        /// seconds; `None` if it does not wait.
        ///
        /// # Errors
        /// None is expected.
        pub fn linger(&self) -> ::std::io::Result<Option<::std::time::Duration>> {
            self.handle().linger()
        }

        /// Sets how long closing the socket waits, in whole seconds; the rest is cut off. The thread that closes it waits,
        /// which may be a worker of a runtime. Zero does not wait: it resets the connection, and unsent data is lost.
        ///
        /// # Errors
        /// None is expected.
        pub fn set_linger(&self, time: Option<::std::time::Duration>) -> ::std::io::Result<()> {
            self.handle().set_linger(time)
        }

        /// Has closing the socket reset the connection, as `set_linger` with a time of zero.
        ///
        /// # Errors
        /// None is expected.
        pub fn set_zero_linger(&self) -> ::std::io::Result<()> {
            self.set_linger(Some(::std::time::Duration::ZERO))
        }
    };
}

/// Those of connections: `stream_options`, `IP_TTL` and `TCP_QUICKACK`.
macro_rules! connection_options {
    () => {
        $crate::net::options::stream_options!();
        $crate::net::options::ttl_option!();
        $crate::net::options::flag_option!(
            "the next acknowledgements are sent at once; as on Linux, this is not permanent",
            quickack,
            set_quickack,
            IPPROTO_TCP,
            TCP_QUICKACK
        );
    };
}

/// `IP_TTL`.
macro_rules! ttl_option {
    () => {
        $crate::net::options::number_option!(
            "the time to live of IPv4 packets, in hops",
            ttl,
            set_ttl,
            IPPROTO_IP,
            IP_TTL
        );
    };
}

/// Type of service, and the device.
macro_rules! service_options {
    () => {
        $crate::net::options::number_option!(
            "the type of service of IPv4 packets",
            tos_v4,
            set_tos_v4,
            IPPROTO_IP,
            IP_TOS
        );
        $crate::net::options::number_option!(
            "the traffic class of IPv6 packets",
            tclass_v6,
            set_tclass_v6,
            IPPROTO_IPV6,
            IPV6_TCLASS
        );

        /// Returns the name of the device that the socket is bound to (`SO_BINDTODEVICE`).
        ///
        /// # Errors
        /// None is expected.
        pub fn device(&self) -> ::std::io::Result<Option<Vec<u8>>> {
            self.handle().device()
        }

        /// Binds the socket to the device of this name; `None` ends that.
        ///
        /// # Errors
        /// `ENODEV`: there is no such device. `PermissionDenied`: the socket is bound to another one.
        pub fn bind_device(&self, name: Option<&[u8]>) -> ::std::io::Result<()> {
            self.handle().bind_device(name)
        }
    };
}

/// Broadcast and multicast.
macro_rules! group_options {
    () => {
        $crate::net::options::flag_option!(
            "datagrams may be sent to a broadcast address",
            broadcast,
            set_broadcast,
            SOL_SOCKET,
            SO_BROADCAST
        );
        $crate::net::options::flag_option!(
            "datagrams sent to an IPv4 group are also delivered to members on this host",
            multicast_loop_v4,
            set_multicast_loop_v4,
            IPPROTO_IP,
            IP_MULTICAST_LOOP
        );
        $crate::net::options::number_option!(
            "the time to live of datagrams sent to an IPv4 group, in hops",
            multicast_ttl_v4,
            set_multicast_ttl_v4,
            IPPROTO_IP,
            IP_MULTICAST_TTL
        );
        $crate::net::options::flag_option!(
            "datagrams sent to an IPv6 group are also delivered to members on this host",
            multicast_loop_v6,
            set_multicast_loop_v6,
            IPPROTO_IPV6,
            IPV6_MULTICAST_LOOP
        );
    };
}

pub(super) use {
    connection_options, flag_option, group_options, number_option, service_options, stream_options,
    ttl_option,
};
