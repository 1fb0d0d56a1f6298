// The decode kernel against a double-precision reference, and its bandwidth with the state out of cache.
//   nvcc -std=c++17 -O3 -I csrc -gencode=arch=compute_90,code=sm_90 csrc/checks/check_decode.cu -o check_decode && ./check_decode
#include "decode_sm80.cu"

#include <cstdio>
#include <vector>
#include <cmath>
#include <algorithm>
#include <random>
using namespace fastmax;
#define CK(x) do{cudaError_t e=(x); if(e){printf("err %s %d\n",cudaGetErrorString(e),__LINE__);exit(1);}}while(0)
static double check(int b,int h,int hk,int d,int dv,int order,int steps){
  std::mt19937 r(7); std::normal_distribution<float> N;
  DecodeParams p{}; p.b=b;p.h=h;p.hk=hk;p.d=d;p.dv=dv;p.math=MathMode::kTF32;p.scale=1/std::sqrt((float)d);p.a0=1;p.a1=1;p.a2=order==2?0.5f:0;if(order==1)p.scale*=0.05f;p.order=order;p.sm_count=132;
  size_t st=(size_t)b*hk*decode_rows(d,order)*decode_columns(dv);
  CK(cudaMalloc(&p.state,st*4)); CK(cudaMemset(p.state,0,st*4)); CK(cudaMalloc(&p.partial,decode_workspace_bytes(p)));
  std::vector<float> q((size_t)steps*b*h*d),k((size_t)steps*b*hk*d),v((size_t)steps*b*hk*dv),o((size_t)steps*b*h*dv);
  for(auto*x:{&q,&k,&v}) for(auto&y:*x) y=N(r);
  float *dq,*dk,*dvp,*dO; CK(cudaMalloc(&dq,q.size()*4));CK(cudaMalloc(&dk,k.size()*4));CK(cudaMalloc(&dvp,v.size()*4));CK(cudaMalloc(&dO,o.size()*4));
  CK(cudaMemcpy(dq,q.data(),q.size()*4,cudaMemcpyHostToDevice));CK(cudaMemcpy(dk,k.data(),k.size()*4,cudaMemcpyHostToDevice));CK(cudaMemcpy(dvp,v.data(),v.size()*4,cudaMemcpyHostToDevice)); CK(cudaMemset(dO,0xff,o.size()*4));
  p.q_batch=h*d;p.q_head=d;p.k_batch=hk*d;p.k_head=d;p.v_batch=hk*dv;p.v_head=dv;p.o_batch=h*dv;p.o_head=dv;
  for(int t=0;t<steps;t++){p.q=dq+(size_t)t*b*h*d;p.k=dk+(size_t)t*b*hk*d;p.v=dvp+(size_t)t*b*hk*dv;p.o=dO+(size_t)t*b*h*dv;launch_decode(p,0);}
  CK(cudaDeviceSynchronize()); CK(cudaMemcpy(o.data(),dO,o.size()*4,cudaMemcpyDeviceToHost));
  double num=0,den=0;
  for(int t=0;t<steps;t++)for(int i=0;i<b;i++)for(int j=0;j<h;j++){int kv=j/(h/hk);std::vector<double> a(dv,0);double z=0;
    for(int u=0;u<=t;u++){double s=0;for(int c=0;c<d;c++)s+=(double)q[((size_t)t*b+i)*h*d+j*d+c]*k[((size_t)u*b+i)*hk*d+kv*d+c];s*=p.scale;double f=p.a0+p.a1*s+p.a2*s*s;z+=f;for(int c=0;c<dv;c++)a[c]+=f*v[((size_t)u*b+i)*hk*dv+kv*dv+c];}
    for(int c=0;c<dv;c++){double e=o[((size_t)t*b+i)*h*dv+j*dv+c]-a[c]/z;num+=e*e;den+=a[c]/z*a[c]/z;}}
  return std::sqrt(num/den);
}
static void bench(int bh,int d,int order){
  DecodeParams p{}; p.b=1;p.h=p.hk=bh;p.d=p.dv=d;p.math=MathMode::kBF16;p.scale=0.1f;p.a0=p.a1=1;p.a2=0.5f;p.order=order;p.sm_count=132;
  size_t st=(size_t)bh*decode_rows(d,order)*decode_columns(d)*4; int sets=std::max(1,(int)(400e6/st));
  std::vector<float*> states(sets); for(auto&s:states){CK(cudaMalloc(&s,st));CK(cudaMemset(s,0,st));}
  CK(cudaMalloc(&p.partial,decode_workspace_bytes(p)));
  void*buf; CK(cudaMalloc(&buf,(size_t)bh*d*8)); CK(cudaMemset(buf,0x3d,(size_t)bh*d*8)); p.q=buf;p.k=(char*)buf+bh*d*2;p.v=(char*)buf+bh*d*4;p.o=(char*)buf+bh*d*6;
  p.q_batch=p.k_batch=p.v_batch=p.o_batch=bh*d;p.q_head=p.k_head=p.v_head=p.o_head=d;
  cudaEvent_t a,b;cudaEventCreate(&a);cudaEventCreate(&b);std::vector<float> ts;
  for(int rep=0;rep<7;rep++){cudaEventRecord(a);for(int i=0;i<100;i++){p.state=states[i%sets];launch_decode(p,0);}cudaEventRecord(b);CK(cudaEventSynchronize(b));float ms;cudaEventElapsedTime(&ms,a,b);ts.push_back(ms/100);}
  std::sort(ts.begin(),ts.end());
  printf("decode bh %d d %d order %d: %.2f us, %.0f GB/s (read+write)\n",bh,d,order,ts[3]*1e3,2.0*st/ts[3]/1e6);
  for(auto s:states)cudaFree(s);
}
int main() {
  printf("errors %.2e %.2e %.2e %.2e %.2e %.2e\n",check(1,10,2,64,64,2,12),check(1,2,2,64,64,2,40),check(2,4,2,32,48,2,30),check(1,6,1,37,51,2,20),check(1,3,3,128,128,2,10),check(2,2,2,64,64,1,60));
  for(int bh:{64,128,256,1024}) bench(bh,64,2);
  bench(64,128,2); bench(256,32,2); bench(1024,64,1);
}
