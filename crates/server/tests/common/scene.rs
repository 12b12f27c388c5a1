//! A process that holds a session, and another that may ask for it.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_types::{SessionId, Slot};

use super::{Library, Near, await_some, control_path};

/// A session held by `holder`, and its peer.
pub(crate) struct Scene {
    pub holder: Library,
    pub other: Library,
    pub id: SessionId,
    pub near: Near,
    pub slot: Slot,
    pub peer: TcpStream,
    pub kernel: TcpListener,
    pub path: PathBuf,
}

pub(crate) fn scene(bed: &Bed) -> Scene {
    let path = control_path(&bed.a);
    let (mut holder, other) = (Library::start(&path), Library::start(&path));
    let any = SocketAddr::new(Bed::B4, 0);
    let kernel = bed.b.enter(|| TcpListener::bind(any)).unwrap();
    let (id, near, slot) = holder.open(kernel.local_addr().unwrap());
    let (peer, _) = kernel.accept().unwrap();
    peer.set_read_timeout(Some(super::TIMEOUT)).unwrap();
    Scene {
        holder,
        other,
        id,
        near,
        slot,
        peer,
        kernel,
        path,
    }
}

impl Scene {
    /// The other process asks for the session, and shows the descriptor.
    pub(crate) fn ask(&mut self) -> u32 {
        let body = RequestBody::Cache {
            session: self.id,
            slot: Slot(0),
        };
        self.other.client.send(body, &[self.near.0.as_fd()])
    }

    pub(crate) fn depart(&mut self) {
        let request = RequestBody::BeginFlush { session: self.id };
        let reply = self.holder.client.ask(request);
        assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    }

    pub(crate) fn recalled(&mut self) -> Vec<SessionId> {
        let mut recalled = Vec::new();
        await_some("a recall", || {
            match self.holder.client.ask(RequestBody::FetchRecalls) {
                ReplyBody::Recalled { sessions, .. } => recalled = sessions,
                other => panic!("{other:?}"),
            }
            (!recalled.is_empty()).then_some(())
        });
        recalled
    }

    pub(crate) fn answer(&mut self, request: u32) -> ReplyBody {
        let (reply, _) = self.other.client.receive().expect("the server answers");
        assert_eq!(reply.id, request);
        reply.body
    }
}
