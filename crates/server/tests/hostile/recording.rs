//! Captures (`portolan capture`): nobody captures others' programs, and captures leave nothing.

use std::path::Path;

use portolan_netns::Bed;
use portolan_proto::capture::{CaptureNews, CaptureRequest, CapturedEnd, RING_MAX, Subject};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::local::Side;
use portolan_types::ChannelId;
use rustix::io::Errno;

use crate::common::{
    Client, Library, await_closes, control_path, open_files_at_rest, start_server,
};
use crate::locals::introduce;
use crate::meter::Meter;
use crate::{as_nobody, assert_serves_others, hostile_library};

const ALL: CaptureRequest = CaptureRequest {
    pid: None,
    ring_size: RING_MAX,
    snap: u32::MAX,
    subject: Subject::All,
};

/// A capture, and what it has heard.
struct Capture {
    client: Client,
    processes: Vec<ChannelId>,
    ends: Vec<CapturedEnd>,
    gone: Vec<ChannelId>,
    closed: usize,
}

impl Capture {
    /// Begins a capture, with the processes and ends that there are.
    fn begin(path: &Path) -> Capture {
        let mut client = Client::connect(path);
        client.send(RequestBody::Capture(ALL), &[]);
        let mut capture = Capture {
            client,
            processes: Vec::new(),
            ends: Vec::new(),
            gone: Vec::new(),
            closed: 0,
        };
        while capture.hear() {}
        capture
    }

    /// Hears one of the server's news. Returns false if that says that all was named.
    fn hear(&mut self) -> bool {
        let (reply, fds) = self.client.receive().expect("the server answers");
        let ReplyBody::Capture(news) = reply.body else {
            panic!("{reply:?}");
        };
        match news {
            CaptureNews::Process { channel, .. } => {
                assert_eq!(fds.len(), 1);
                self.processes.push(channel);
            }
            CaptureNews::Ends(ends) => self.ends.extend(ends),
            CaptureNews::Closed { .. } => self.closed += 1,
            CaptureNews::ProcessGone(channel) => self.gone.push(channel),
            CaptureNews::Ready => return false,
        }
        true
    }
}

#[test]
fn nobody_captures_the_own_programs_only() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let (mut honest, mut other) = (Library::start(&path), Library::start(&path));
    let mut hostile = hostile_library(&path);
    let _roots = introduce(&mut honest, &mut other);
    let first = introduce(&mut hostile, &mut honest);
    let mut nobodys = as_nobody(|| Capture::begin(&path));
    assert_eq!(nobodys.processes.len(), 1);
    assert_eq!(nobodys.ends.len(), 1, "{:?}", nobodys.ends);
    assert_eq!(nobodys.ends[0].side, Side::Opener);
    let mut roots = Capture::begin(&path);
    // The meter is a process, too, and starts others.
    let before = roots.processes.len();
    assert!(before >= 3);
    assert_eq!(roots.ends.len(), 4);
    // Later ones likewise.
    let _late = hostile_library(&path);
    let _roots = introduce(&mut honest, &mut other);
    let second = introduce(&mut honest, &mut hostile);
    nobodys.hear();
    nobodys.hear();
    assert_eq!((nobodys.processes.len(), nobodys.ends.len()), (2, 2));
    assert_eq!(nobodys.ends[1].side, Side::Accepter);
    while roots.ends.len() < 8 {
        roots.hear();
    }
    assert!(roots.processes.len() > before);
    drop(hostile);
    while nobodys.gone.is_empty() {
        nobodys.hear();
    }
    // They end with their descriptors: both ends of each.
    drop((first, second));
    while nobodys.closed < 4 {
        nobodys.hear();
    }
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

fn errno_of(path: &Path, body: RequestBody) -> Errno {
    match Client::connect(path).ask(body) {
        ReplyBody::Error { errno } => Errno::from_raw_os_error(errno),
        other => panic!("{other:?}"),
    }
}

#[test]
fn captures_are_few_and_leave_nothing() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    // They never fetch their rings.
    let _hostile: Vec<Library> = (0..4).map(|_| hostile_library(&path)).collect();
    let before = open_files_at_rest(&server);
    as_nobody(|| {
        for _ in 0..200 {
            drop(Capture::begin(&path));
        }
        let _kept = [Capture::begin(&path), Capture::begin(&path)];
        assert_eq!(errno_of(&path, RequestBody::Capture(ALL)), Errno::BUSY);
        assert_eq!(errno_of(&path, RequestBody::FetchCaptures), Errno::PERM);
    });
    drop(Capture::begin(&path));
    await_closes(&server, before);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}
