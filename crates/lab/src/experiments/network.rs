//! Speed of a guest's network: TCP streams in both directions, and requests of a few bytes.
//!
//! The guest is on a tap interface of its host. Debian's iperf3 measures the streams; requests are
//! sent by the laboratory to a server in the guest that sends them back. Ebb and QEMU take turns.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command as Program;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use serde::Serialize;
use serde_json::Value;

use crate::LabError;
use crate::harness::experiment::{Experiment, Needed, Needs, Run, Runs, SeriesPlan, parameters};
use crate::harness::monitor::{MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::tap::{GUEST, Tap, output};
use crate::harness::testbed::Testbed;
use crate::harness::turns::in_turns;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};

/// The experiment.
pub static NETWORK: Experiment = Experiment {
    name: "network",
    summary: "How fast a guest's network is: streams in both directions, and requests",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| {
        let mut parameters = parameters(&sizes(scale));
        parameters.insert("request_bytes".to_owned(), REQUEST_BYTES as u64);
        parameters
    },
    guests: |scale| sizes(scale).rounds * rows().len() as u32,
    needs: Needs {
        network: true,
        programs: &[IPERF],
        guest_programs: &[IPERF, BUSYBOX],
        guest_modules: &["virtio_net"],
        ..Experiment::DEFAULT.needs
    },
    metrics: || metrics::describe(metrics()),
    series: || {
        let plan = |(name, summary, setup)| SeriesPlan {
            runs: Runs::ByDefault,
            ..SeriesPlan::new(name, summary, Run::SameGuests(setup, run))
        };
        rows().map(plan).into()
    },
    compare: |all| metrics::mark_noise(&metrics(), all),
    ..Experiment::DEFAULT
};

const IPERF: Needed = Needed { path: "/usr/bin/iperf3", remedy: "Debian: apt-get install iperf3" };
const BUSYBOX: Needed =
    Needed { path: "/bin/busybox", remedy: "Debian: apt-get install busybox-static" };
/// Port of the server that sends requests back.
const PORT: u16 = 7007;
/// Size of a request and of its answer.
const REQUEST_BYTES: usize = 64;
/// Connections of the second measurement of requests.
const MANY: usize = 8;
/// Time limit of an answer, and for a server to listen.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// Interval of attempts to connect.
const RETRY: Duration = Duration::from_millis(20);

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// Duration of each measurement.
    seconds: u32,
    /// Number of guests of each series.
    rounds: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1536, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 256, cpus: 1 },
            seconds: 2,
            rounds: 2,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 2048, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 512, cpus: 1 },
            seconds: 10,
            rounds: 5,
        },
    }
}

fn rows() -> [(&'static str, &'static str, Setup); 2] {
    let ebb = Setup { lean: true, uncompressed_kernel: true, ..Setup::EBB };
    let qemu = Setup { monitor: MonitorKind::Qemu, ..ebb };
    [
        ("ebb", "ebb run --net tap=NAME", ebb),
        ("qemu", "virtio-net-pci on a tap interface, vhost=off", qemu),
    ]
}

/// Results in one guest.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Rates {
    to_guest_mbit_s: f64,
    from_guest_mbit_s: f64,
    requests_per_s: f64,
    /// The same over several connections.
    many_per_s: f64,
    /// Times that a thread of the monitor has waited for each request of one connection.
    waits_a_request: f64,
}

fn metrics() -> Vec<Metric<Vec<Rates>>> {
    let metric = |name: &str, title: &str, unit: &str, value: fn(&Rates) -> f64| {
        let values = move |all: &Vec<Rates>| all.iter().map(value).collect();
        Metric::median(name, title, unit, values).better_higher()
    };
    vec![
        metric("stream_to_guest_mbit_s", "TCP stream to the guest", "Mbit/s", |it| {
            it.to_guest_mbit_s
        }),
        metric("stream_from_guest_mbit_s", "TCP stream from the guest", "Mbit/s", |it| {
            it.from_guest_mbit_s
        }),
        metric("requests_per_s", "Requests of 64 bytes, one at a time", "1/s", |it| {
            it.requests_per_s
        }),
    ]
}

fn run(testbed: &mut Testbed<'_>, all: &mut [Series]) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let _tap = Tap::new()?;
    let (found, outcome) =
        in_turns(sizes.rounds, all, |series| in_one_guest(testbed, series, &sizes));
    for (series, found) in all.iter_mut().zip(&found) {
        fill(found, series);
    }
    outcome
}

fn in_one_guest(
    testbed: &mut Testbed<'_>,
    series: &mut Series,
    sizes: &Sizes,
) -> Result<Rates, LabError> {
    if let Some((.., setup)) = rows().into_iter().find(|(name, ..)| *name == series.name) {
        testbed.run_like(setup);
    }
    let record = testbed.start_with(sizes.guest, &[Tap::DEVICE])?;
    let rates = measure(testbed, record.guest, sizes);
    testbed.end_guest(record.guest);
    series.guests.push(record);
    rates
}

fn measure(testbed: &mut Testbed<'_>, guest: u32, sizes: &Sizes) -> Result<Rates, LabError> {
    let line = format!("ifconfig lo up; ifconfig eth0 {GUEST} netmask 255.255.255.0 up");
    let argv = [BUSYBOX.path, "sh", "-c", &line].map(str::to_owned).to_vec();
    testbed.ask(guest, Command::Exec { argv })?;
    testbed.begin(guest, Command::TcpEcho { port: PORT })?;
    let argv = [IPERF.path, "-s"].map(str::to_owned).to_vec();
    testbed.begin(guest, Command::Exec { argv })?;
    let step = |testbed: &Testbed<'_>, text: &str| testbed.events().step(guest, text);
    let lasts = Duration::from_secs(sizes.seconds.into());
    let mut rates = Rates::default();
    step(testbed, "answers requests");
    let before = testbed.waits(guest)?;
    rates.requests_per_s = requests(1, lasts)?;
    let waits = testbed.waits(guest)?.saturating_sub(before) as f64;
    rates.waits_a_request = waits / (rates.requests_per_s * lasts.as_secs_f64()).max(1.0);
    step(testbed, "answers requests of several connections");
    rates.many_per_s = requests(MANY, lasts)?;
    step(testbed, "receives a stream");
    rates.to_guest_mbit_s = stream(&[], sizes.seconds)?;
    step(testbed, "sends a stream");
    rates.from_guest_mbit_s = stream(&["-R"], sizes.seconds)?;
    Ok(rates)
}

/// The rate of a stream to the guest; with `-R`, from the guest.
fn stream(words: &[&str], seconds: u32) -> Result<f64, LabError> {
    let mut program = Program::new(IPERF.path);
    let (guest, seconds) = (GUEST.to_string(), seconds.to_string());
    program.args(["-c", &guest, "-t", &seconds, "-O", "1", "-J"]).args(words);
    let text = output(&mut program)?;
    received_mbit_s(&text)
        .ok_or_else(|| LabError::Network { command: format!("{program:?}"), reason: text })
}

/// The rate at the receiving end in iperf3's document.
fn received_mbit_s(text: &str) -> Option<f64> {
    let document: Value = serde_json::from_str(text).ok()?;
    Some(document["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e6)
}

/// Requests a second over so many connections, each with one request at a time.
fn requests(connections: usize, lasts: Duration) -> Result<f64, LabError> {
    let failed = |error: std::io::Error| LabError::Network {
        command: format!("requests to {GUEST}:{PORT}"),
        reason: error.to_string(),
    };
    let streams: Result<Vec<TcpStream>, _> = (0..connections).map(|_| connect()).collect();
    let streams = streams.map_err(failed)?;
    let begun = Instant::now();
    let counts = thread::scope(|scope| {
        let each = |stream| scope.spawn(move || ask(stream, begun, lasts));
        let threads: Vec<_> = streams.into_iter().map(each).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, std::io::Result<u64>>| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread has panicked")))
        };
        threads.into_iter().map(join).sum::<std::io::Result<u64>>()
    });
    Ok(counts.map_err(failed)? as f64 / begun.elapsed().as_secs_f64())
}

/// Connects to the server, which may not listen yet.
fn connect() -> std::io::Result<TcpStream> {
    let deadline = Instant::now() + SILENCE_LIMIT;
    loop {
        match TcpStream::connect_timeout(&SocketAddr::from((GUEST, PORT)), SILENCE_LIMIT) {
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => thread::sleep(RETRY),
            connected => return connected,
        }
    }
}

/// Sends requests one after the other; returns their number.
fn ask(mut stream: TcpStream, begun: Instant, lasts: Duration) -> std::io::Result<u64> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_LIMIT))?;
    let (request, mut answer) = ([0x5a; REQUEST_BYTES], [0; REQUEST_BYTES]);
    let mut count = 0;
    while begun.elapsed() < lasts {
        stream.write_all(&request)?;
        stream.read_exact(&mut answer)?;
        count += 1;
    }
    Ok(count)
}

fn fill(found: &Vec<Rates>, series: &mut Series) {
    metrics::measure(&metrics(), found, series);
    let many = format!("requests/s over {MANY} connections");
    series.details.push(DataTable::of(
        "guests",
        found,
        &[
            ("to the guest, Mbit/s", &|it: &Rates| it.to_guest_mbit_s.into()),
            ("from the guest, Mbit/s", &|it| it.from_guest_mbit_s.into()),
            ("requests/s", &|it| it.requests_per_s.into()),
            (&many, &|it| it.many_per_s.into()),
            ("waits of the monitor's threads a request", &|it| it.waits_a_request.into()),
        ],
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn results_of_iperf_are_read() {
        let text = "{\"end\": {\"sum_sent\": {\"bits_per_second\": 3e9}, \"sum_received\": \
                    {\"bits_per_second\": 2.5e9}}}";
        assert_eq!(received_mbit_s(text), Some(2500.0));
        for text in ["", "{\"error\": \"no route\"}", "{\"end\": {}}"] {
            assert_eq!(received_mbit_s(text), None, "{text}");
        }
    }

    #[test]
    fn answered_requests_are_counted() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        thread::spawn(move || ebb_agent::tcp_echo::serve(&listener));
        let count = ask(stream, Instant::now(), Duration::from_millis(50)).unwrap();
        assert!(count > 0);
    }

    #[test]
    fn metrics_are_medians_of_the_guests() {
        let rates = |factor: f64| Rates {
            to_guest_mbit_s: 100.0 * factor,
            from_guest_mbit_s: 200.0 * factor,
            requests_per_s: 300.0 * factor,
            ..Rates::default()
        };
        let mut series = Series::new("ebb", String::new());
        fill(&[1.0, 3.0, 2.0].map(rates).to_vec(), &mut series);
        assert_eq!(series.metrics["stream_to_guest_mbit_s"], Some(200.0));
        assert_eq!(series.metrics["stream_from_guest_mbit_s"], Some(400.0));
        assert_eq!(series.metrics["requests_per_s"], Some(600.0));
    }
}
