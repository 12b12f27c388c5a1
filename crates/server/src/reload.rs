//! Replaces the configuration of a running server, all of it or nothing. Parameters told to programs apply to those
//! that register afterwards.

use std::os::fd::OwnedFd;

use portolan_control::{ClientId, Errno, Shares, Slices};
use portolan_proto::control::{Blob, Reloaded, ReplyBody};
use portolan_sys::shm;
use tracing::{error, info};

use crate::config::{Change, Config};
use crate::requests::Answer;
use crate::server::{Server, set_permissions};

impl Server {
    /// SIGHUP: reads the file again.
    pub(crate) fn reload_file(&mut self) {
        let path = self.source.file.as_ref();
        let path = path.map_or_else(|| "no file".into(), |path| path.display().to_string());
        let read = self.source.read().map_err(|error| {
            format!("{error} (a file that was put in its place is read by `portolan reload`)")
        });
        match read.map(|config| self.take_config(config)) {
            Ok(Reloaded::Changed(keys)) => info!(path, changed = keys.join(", "), "reloaded"),
            Ok(Reloaded::Refused(reasons)) => {
                error!(path, "the configuration stays: {}", reasons.join("; "));
            }
            Err(reason) => error!("the configuration stays: {reason}"),
        }
    }

    /// `Reload`: applies the text that root's command has read.
    pub(crate) fn reload_text(
        &mut self,
        client: ClientId,
        (text, fds): (Blob, Vec<OwnedFd>),
    ) -> Result<Answer, Errno> {
        let client = self.clients.get(&client).ok_or(Errno::BADF)?;
        if client.credentials.uid != 0 {
            return Err(Errno::PERM);
        }
        let bytes = shm::unpack(text, fds.into_iter().next()).map_err(|_| Errno::INVAL)?;
        let text = std::str::from_utf8(&bytes).map_err(|_| Errno::INVAL)?;
        let reloaded = match self.source.parse(text) {
            Ok(config) => self.take_config(config),
            Err(error) => Reloaded::Refused(vec![error.to_string()]),
        };
        match &reloaded {
            Reloaded::Changed(keys) => info!(changed = keys.join(", "), "reloaded"),
            Reloaded::Refused(reasons) => {
                info!("the configuration stays: {}", reasons.join("; "));
            }
        }
        Ok(ReplyBody::Reloaded(reloaded).into())
    }

    fn take_config(&mut self, mut next: Config) -> Reloaded {
        // The value measured at the start stays unless the file sets one.
        if next.spin_us.is_none() {
            next.spin_us = self.config.spin_us;
        }
        let changes = self.config.changes(&next);
        let mut refused: Vec<String> = changes.iter().filter_map(refusal).collect();
        let is_of_socket = |change: &Change| change.key.starts_with("socket_");
        if refused.is_empty() && changes.iter().any(is_of_socket) {
            let set = set_permissions(&next, &self.socket);
            refused.extend(set.err().map(|error| error.to_string()));
            if !refused.is_empty() {
                // It may have been applied in part.
                let _ = set_permissions(&self.config, &self.socket);
            }
        }
        if !refused.is_empty() {
            return Reloaded::Refused(refused);
        }
        if self.config.limits != next.limits {
            let limits = &next.limits;
            self.control.set_limits(&limits.of_control());
            self.connections.set_limit(limits.connections());
            self.sharing.set_limit(limits.shared_ports());
            self.slices = Slices::new(limits.slice());
            self.shares = Shares::new(limits.time_share);
        }
        let is_other_policy = self.config.host_policy != next.host_policy;
        self.config = next;
        if is_other_policy {
            self.publish();
        }
        Reloaded::Changed(changes.iter().map(|change| change.key.to_owned()).collect())
    }
}

fn refusal(change: &Change) -> Option<String> {
    let reason = change.refusal?;
    Some(format!("`{}` takes a restart: {reason}", change.key))
}
